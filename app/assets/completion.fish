# Completion of finetune in fish 3 or newer.

# Print the arguments of a command: "key=" with its values, or a word without a key. "/" means file names.
function __finetune_words
    switch $argv[1]
    @SETTINGS@
    end
end

function __finetune_values
    set -l word $argv[2]
    set -l key (string split -m 1 = -- $word)[1]
    set -l typed (string split -m 1 = -- $word)[2]
    for line in (__finetune_words $argv[1])
        test (string split -m 1 = -- $line)[1] = "$key"; or continue
        for value in (string split -n ' ' -- (string split -m 1 = -- $line)[2])
            if test $value = /
                printf '%s\n' $key=(__fish_complete_path $typed)
            else
                echo $key=$value
            end
        end
    end
end

# Print keys up to the next dot, so that a long list of keys is shown section by section.
function __finetune_keys
    set -l word $argv[2]
    set -l start (string length -- $word)
    for line in (__finetune_words $argv[1])
        if test $line = /
            __fish_complete_path $word
            continue
        end
        set -l name (string replace -r '=.*' '=' -- $line)
        test (string sub -l $start -- $name) = "$word"; or continue
        set -l rest (string sub -s (math $start + 1) -- $name)
        echo $word(string replace -r '\..*' '.' -- $rest)
    end
end

function __finetune_complete
    set -l tokens (commandline -opc)
    set -l word (commandline -ct)
    if test (count $tokens) -lt 2
        printf '%s\n' @COMMANDS@
    else if string match -q '*=*' -- $word
        __finetune_values $tokens[2] $word
    else
        __finetune_keys $tokens[2] "$word"
    end
end

complete -c finetune -f -a '(__finetune_complete)'
